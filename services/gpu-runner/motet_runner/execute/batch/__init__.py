"""An iteration as numbers: the table of rows, and their new tokens in one line. It knows the plan, pages and positions,
and nothing of models, kernels or sampling."""
