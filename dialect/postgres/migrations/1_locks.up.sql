CREATE TABLE {table} (
	id    bigint PRIMARY KEY,
	name  text   NOT NULL,
	fence bigint NOT NULL DEFAULT 0
)
