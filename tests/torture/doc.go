// Package torture treats locks as badly as it can and looks whether they hold.
//
// Some processes (tests/worker, its command "torture"), each with some
// goroutines, fight for a few keys, exclusive and shared, one and several at a
// time: they try, wait, are cancelled, work under the lock, give it back. Each
// writes down what it does. Meanwhile faults are done to them: sessions and
// processes are killed, processes stopped, connections cut, reset, silenced and
// slowed down by a proxy, the server crashed and restarted. In the end the
// histories of all processes are laid side by side and checked.
//
//	make torture                      # five minutes for each database
//	make torture DURATION=20m SEED=7 DATABASE=mysql
//
// The seed decides about the faults and about what each process does, not about
// how the processes' steps fall together: another run with the same seed is
// similar, not the same.
//
// # What is certain
//
// A process can tell what it saw, and when, by a clock that all processes of the
// machine share. It cannot tell when the server granted or freed a key, only that
// this happened before something and after something else:
//
//	asked ─────── granted ─────── evidence ─ ─ ─ ─ ─ ─ ─ heard of the loss
//	      the server        certainly held     the server may free it at
//	      grants it                            any time, also after this
//
// Evidence is what only a holder can do: a Check that says yes, a statement that
// succeeds on the lock's own session, a release that the server confirms. It is
// stamped before it is tried: when it succeeds, the lock was held until then at
// least. After its last evidence a hold proves nothing. A session that was killed
// a moment later has lost its lock, and its holder learns that later still, or
// never if its process was killed too. So two holders may believe to hold a key
// at once without a fault of the locks, but never can two be certain. All checks
// count only what is certain, so what they find is a defect.
//
// # What is checked
//
//   - overlap: no two conflicting holds of a key are certain at the same time, and
//     none is granted while another one is certain.
//   - fencing: each grant of a key has a number; no number is given twice; a grant
//     that was returned before another was asked for has the smaller one.
//   - witness: holders add one to a row, which they read and write in two
//     statements without a row lock, so that two holders at once lose an update.
//     Each write is logged in its own transaction. The log must have each number
//     once, and what a process was told is committed. There are two such rows for
//     each key. One is written in a transaction on the session that holds the key,
//     guarded by the lock alone: whatever ends the lock undoes the transaction
//     first. The other is written through another connection by holders that may
//     have lost the lock without knowing, so the fencing number guards it: a holder
//     puts its number into the row before it reads, and the row takes nothing from
//     a smaller one. (To compare the numbers only when writing would not do: a late
//     write could come between the reading and the first writing of the next
//     holder, who would overwrite it.)
//   - stale: a holder whose write is refused for a larger number has lost its lock,
//     so it has no evidence later.
//   - linearizability: there is an order of the grants and the ends of all holds of
//     a key, each at a moment within its own time, in which it behaves as a lock
//     does and the numbers grow. Package porcupine searches for it.
//   - heard: who loses a lock hears of it soon, also while it does nothing: no two
//     processes that run believe for longer than some seconds to hold a key.
//   - errors: calls fail for the reasons that their documentation names. A deadlock
//     is none of these: calls for several keys cannot deadlock each other. An error
//     without a class is none either.
//   - leak: once all calls have returned and every lock was given back, the server's
//     own view shows no lock, before the processes end; and then all keys can be
//     taken at once.
//   - liveness: every key is granted again after the last fault.
//   - hang, process: processes do what they are told in time, without data races and
//     panics.
//
// That the checks can fail is tested too: by bad histories, and by workers with
// planted bugs, such as to give the key back too early.
package torture
