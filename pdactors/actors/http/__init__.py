"""The OpenAI API over HTTP: the gateway's third kind of client socket. Home of starlette and uvicorn."""
