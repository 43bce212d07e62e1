"""The packages of Motet and their titles on the pages, in the order of the pages."""

PACKAGES = {
    "motet": "Every process",
    "motet_gateway": "Gateway",
    "motet_scheduler": "Scheduler",
    "motet_supervisor": "Supervisor",
    "motet_predictor": "Predictor",
    "motet_runner": "Runner",
    "motet_operator": "Operator",
    "motet_simulator": "Simulator",
    "motet_cli": "Command line",
}
