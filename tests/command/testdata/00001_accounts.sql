-- +goose Up
CREATE TABLE accounts (id INT PRIMARY KEY, balance INT NOT NULL);

-- +goose Down
DROP TABLE accounts;
