"""An iteration as numbers: the table of rows, and their new tokens as one sequence. It knows the plan, pages and
positions, but no models, kernels or sampling."""
