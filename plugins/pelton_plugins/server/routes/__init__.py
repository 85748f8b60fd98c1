"""The built-in route groups, each offered through the `pelton_http_routes` hook."""
