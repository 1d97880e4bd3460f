CREATE TABLE {table} (
	id bigint NOT NULL PRIMARY KEY CLUSTERED,
	name varchar(64) NOT NULL,
	fence bigint NOT NULL DEFAULT 0
);
