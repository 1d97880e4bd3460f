package mysql

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/dblock-go/dblock/dialect"
)

// Exchange gives keys back first. One statement calls every function, in the order
// of its columns.
func (s *session) Exchange(deadline time.Time, tries, releases []dialect.Key) (granted, released []bool, err error) {
	if err := checkKeys(tries); err != nil {
		return nil, nil, err
	}
	if err := checkKeys(releases); err != nil {
		return nil, nil, err
	}
	if len(tries)+len(releases) == 0 {
		return nil, nil, nil
	}
	ctx, cancel := context.WithDeadline(context.Background(), deadline)
	defer cancel()
	query := "SELECT CONNECTION_ID()" + list(", RELEASE_LOCK(", releases, ")") + list(", GET_LOCK(", tries, ", 0)")
	row := make([]driver.Value, 1+len(releases)+len(tries))
	if err := s.driverRow(ctx, query, row); err != nil {
		return nil, nil, s.failure(ctx, err)
	}
	id, err := integer(row[0])
	if err == nil {
		err = s.same(id)
	}
	if err != nil {
		return nil, nil, err
	}
	if released, err = ones(row[1 : 1+len(releases)]); err != nil {
		return nil, nil, err
	}
	tried := row[1+len(releases):]
	for _, value := range tried {
		if value == nil {
			return nil, nil, interrupted()
		}
	}
	granted, err = ones(tried)
	return granted, released, err
}

// driverRow reads the only row of a query past database/sql, which starts a goroutine
// for each query whose context can end; that costs as much as the query.
func (s *session) driverRow(ctx context.Context, query string, row []driver.Value) error {
	return s.conn.Raw(func(c any) error {
		q, ok := c.(driver.QueryerContext)
		if !ok {
			return fmt.Errorf("the driver's %T runs no queries", c)
		}
		rows, err := q.QueryContext(ctx, query, nil)
		if err != nil {
			return err
		}
		return errors.Join(rows.Next(row), rows.Close())
	})
}

func ones(values []driver.Value) ([]bool, error) {
	list := make([]bool, len(values))
	for i, value := range values {
		if value == nil { // nobody holds what was to be given back
			continue
		}
		n, err := integer(value)
		if err != nil {
			return nil, err
		}
		list[i] = n == 1
	}
	return list, nil
}

// integer is a number of the text protocol, which drivers hand over in several ways.
func integer(value driver.Value) (int64, error) {
	switch v := value.(type) {
	case int64:
		return v, nil
	case uint64:
		return int64(v), nil
	case []byte:
		return strconv.ParseInt(string(v), 10, 64)
	case string:
		return strconv.ParseInt(v, 10, 64)
	}
	return 0, fmt.Errorf("%T instead of a number", value)
}
