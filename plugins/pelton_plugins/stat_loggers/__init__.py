"""Built-in stat loggers: a log line every few seconds, and Prometheus families."""
