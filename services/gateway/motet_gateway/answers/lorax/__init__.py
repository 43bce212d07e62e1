"""LoRAX's own API, which it has from TGI: /generate, /generate_stream, and / for its client library."""
