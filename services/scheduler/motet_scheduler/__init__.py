"""Where each request runs, and when: queue, ledger of promises, placement, and placing again what was lost.

`policy/` decides and is pure; `service.py` carries it to gateways, runners and the operator. Payload never comes here.
"""
