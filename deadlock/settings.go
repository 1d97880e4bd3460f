package deadlock

import "github.com/dblock-go/dblock/dialect"

// Settings say how a transaction that dblock begins fares in a deadlock, for the options
// of rowlock and advisory: Priority on SQL Server, Timeout on PostgreSQL. MySQL and
// MariaDB have neither: InnoDB rolls back the transaction that changed the fewest rows.
// What a database does not have is [dblock.ErrUnsupported] there.
type Settings = dialect.DeadlockSettings
