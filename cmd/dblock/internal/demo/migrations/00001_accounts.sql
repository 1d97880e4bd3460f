-- +goose Up
CREATE TABLE dblock_demo_accounts (
    id      INTEGER     NOT NULL PRIMARY KEY,
    owner   VARCHAR(20) NOT NULL,
    balance INTEGER     NOT NULL
);
INSERT INTO dblock_demo_accounts (id, owner, balance) VALUES (1, 'alice', 1000);
INSERT INTO dblock_demo_accounts (id, owner, balance) VALUES (2, 'bob', 1000);

-- +goose Down
DROP TABLE dblock_demo_accounts;
