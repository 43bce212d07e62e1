"""What exists: pools, runners, adapters and their status, kept equal to what is declared.

`reconcile/` decides and is pure; `local/` carries its plans out on a watched folder and on processes.
"""
