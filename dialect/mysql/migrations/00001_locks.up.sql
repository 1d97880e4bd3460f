-- Data definition commits at once, and a crash may follow: both steps can be repeated.
CREATE TABLE IF NOT EXISTS {{table}} (
    id    BIGINT        NOT NULL PRIMARY KEY,
    name  VARBINARY(64) NOT NULL,
    fence BIGINT        NOT NULL DEFAULT 0
) ENGINE = InnoDB
