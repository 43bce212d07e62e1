"""An iteration as numbers: the table of rows, and the rows' new tokens as one sequence. This package knows plans, pages
and positions, but no models, kernels or sampling."""
