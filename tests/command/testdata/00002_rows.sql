-- +goose Up
INSERT INTO accounts (id, balance) VALUES (1, 100);

-- +goose Down
DELETE FROM accounts;
