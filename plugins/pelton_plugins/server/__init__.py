"""The HTTP server: OpenAI's API over Litestar and uvicorn."""
