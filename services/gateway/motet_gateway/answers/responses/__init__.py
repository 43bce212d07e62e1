"""OpenAI's Responses API, of which nothing is stored: /v1/responses."""
