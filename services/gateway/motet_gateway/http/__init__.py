"""HTTP/1.1 over the connections that uvicorn accepts."""
