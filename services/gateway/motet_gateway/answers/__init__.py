"""From tokens to what the client reads: each choice as text, the two wire formats, the answer that joins them."""
