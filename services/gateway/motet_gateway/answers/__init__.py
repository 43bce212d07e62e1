"""From tokens to what the client reads: the text of each choice, the two wire formats, and the answer that joins them."""
