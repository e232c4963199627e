"""A page to talk to what is served and to look into it: static files, and routes for them."""
