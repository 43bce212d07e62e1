"""What a runner does about adapters, without threads, files and sockets: `AdapterPolicy` gets events and returns
effects.

An order has these stages. A failed fetch delays only orders from the same source for the same namespace, not other
orders for the same bytes:

| stage    | it waits for | then                                                                            |
|----------|--------------|---------------------------------------------------------------------------------|
| finding  | `Find`       | `Held`: checking. None: fetching, unless the source failed just now             |
| fetching | `Fetch`      | `Held`: checking. `Failure`: the order and the requests for its manifest fail   |
| checking | `Check`      | `Certification`: proving. `Failure`: the order fails, the lease is released     |
| proving  | the engine   | `engine_proved`: answered. `engine_proved_not`: the order fails                 |

Only an adapter that was never proved has the last stage, and only with an engine that proves: see `proof_orders`.
Requests do not wait for it here: the engine serves nothing that is to be proved first. An order without a digest begins
with fetching: only the files say which digest it is. A digest (`AdapterLife`) has these stages:

| stage     | folder | it waits for      | then                                                                     |
|-----------|--------|-------------------|--------------------------------------------------------------------------|
| absent    | no     | an order          | forgotten when no request waits for it or uses it                        |
| looking   | no     | `Find`            | `Held` with a certificate: certified. Otherwise absent                   |
| fetched   | leased | an order to check | checking                                                                 |
| checking  | leased | `Check`           | certified, or absent                                                     |
| certified | leased | nothing           | requests use it. `vanished`, `engine_failed`: looking. Idle: evicting.   |
|           |        |                   | `engine_proved_not`, because its results are wrong: absent               |
|           |        |                   | `template_lost`: checking                                                |
| evicting  | no     | `Evict`           | None: absent. `Held`, `Failure`: its folder and lease stay               |

`Held` says that a folder exists, and hands over its lease: at no moment could the folder be evicted. A folder with
another inode replaces the held folder; then nothing that was known about the old folder holds. If nothing waits for an
effect's answer any more, the answer is dropped, and its lease is released.
"""
