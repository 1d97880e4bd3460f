-- +goose Up
CREATE TABLE dblock_demo_projection (
    id       INTEGER NOT NULL PRIMARY KEY,
    position INTEGER NOT NULL,
    fence    BIGINT  NOT NULL
);
INSERT INTO dblock_demo_projection (id, position, fence) VALUES (1, 0, 0);

CREATE TABLE dblock_demo_steps (
    position INTEGER     NOT NULL PRIMARY KEY,
    fence    BIGINT      NOT NULL,
    leader   VARCHAR(20) NOT NULL
);

-- +goose Down
DROP TABLE dblock_demo_steps;
DROP TABLE dblock_demo_projection;
