-- +goose Up
CREATE TABLE accounts (id bigint PRIMARY KEY, currency text);

-- +goose Down
DROP TABLE accounts;
