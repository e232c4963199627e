"""What is served, told to machines and people: from the tables of routes and of fields."""
