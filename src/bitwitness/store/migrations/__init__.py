"""The migrations of the console's database, one file a step: applied in order whenever a database is opened."""
