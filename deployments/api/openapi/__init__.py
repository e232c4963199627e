"""The OpenAPI document and the HTML page of the HTTP API, derived from the tables of routes and
fields."""
