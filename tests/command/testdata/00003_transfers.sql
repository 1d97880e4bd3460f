-- +goose Up
CREATE TABLE transfers (id INT PRIMARY KEY, amount INT NOT NULL);
UPDATE accounts SET balance = balance + 1;

-- +goose Down
UPDATE accounts SET balance = balance - 1;
DROP TABLE transfers;
