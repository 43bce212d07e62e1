"""Whether an order refuses an adapter that fits and is proved: what its manifest says of recorded answers."""

from motet.digest import RECORD_FILE
from motet.errors import AdapterIncompatible
from motet_runner.adapters.policy.life import AdapterLife
from motet_runner.adapters.policy.values import Order
from motet_runner.adapters.recorded_answers import NO_RECORD


def refusal_of(order: Order, life: AdapterLife) -> AdapterIncompatible | None:
    if not order.check or life.checked is None:
        return None
    if order.requires_record and not life.checked.recorded:
        return AdapterIncompatible(
            f"spec.verify.require is Record, and the adapter has no {RECORD_FILE}. Write it where the adapter was "
            "trained: `motet adapter record`.",
            reason=NO_RECORD,
        )
    if order.refuses_mismatch and life.compared is not None:
        return life.compared.refusal()
    return None
