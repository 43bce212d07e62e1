"""What a gateway has of the other services: for its process, and for simulations of it."""

from typing import NamedTuple, Self

from motet.settings import Addresses
from motet.surroundings import Surroundings
from motet_gateway.catalog import CurrentCatalog
from motet_gateway.dispatcher import Dispatcher
from motet_gateway.estimator import Estimator
from motet_gateway.held_requests import HeldRequests
from motet_gateway.metrics import Metrics
from motet_gateway.settings import Settings


class Links(NamedTuple):
    estimator: Estimator
    """Asks the predictor."""
    dispatcher: Dispatcher
    """Speaks with scheduler and runners."""

    @classmethod
    def of(
        cls,
        name: str,
        settings: Settings,
        addresses: Addresses,
        metrics: Metrics,
        *,
        catalog: CurrentCatalog,
        held: HeldRequests,
        surroundings: Surroundings,
        time_scale: float = 1.0,
    ) -> Self:
        """`name`: the gateway's, unique per start."""
        estimator = Estimator(
            addresses.predictor_address,
            metrics,
            network=surroundings.network,
            budget_seconds=settings.predict_budget_seconds,
            time_scale=time_scale,
        )
        dispatcher = Dispatcher(
            name,
            addresses.scheduler_address,
            catalog,
            metrics,
            network=surroundings.network,
            connect_seconds=settings.connect_seconds * time_scale,
            held=held,
            clock=surroundings.clock,
        )
        return cls(estimator, dispatcher)
