"""Decides where and when each request runs: queue, ledger of promises, placement, and placement again after a loss.

`policy/` decides and is pure; `service.py` sends the decisions to gateways, runners and the operator. Prompts and
answers never reach the scheduler."""
