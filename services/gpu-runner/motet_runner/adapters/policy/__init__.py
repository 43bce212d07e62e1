"""What a runner does about adapters, without threads, files and sockets: `AdapterPolicy` gets events and returns
effects.

An order has these stages. A failed fetch delays only orders from the same source for the same namespace, not others
that want the same bytes:

| stage    | it waits for | then                                                                            |
|----------|--------------|---------------------------------------------------------------------------------|
| finding  | `Find`       | `Held`: checking. None: fetching, unless its source failed just now             |
| fetching | `Fetch`      | `Held`: checking. `Failure`: it fails, and so do requests for its manifest      |
| checking | `Check`      | `Certification`: answered. `Failure`: it fails, and the runner lets the folder go |

An order without a digest begins with fetching: only the files say which digest it is. A digest (`AdapterLife`) has
these stages:

| stage     | folder | it waits for      | then                                                                     |
|-----------|--------|-------------------|--------------------------------------------------------------------------|
| absent    | no     | an order          | forgotten when no request waits for it or uses it                        |
| looking   | no     | `Find`            | `Held` with a certificate: certified. Otherwise absent                   |
| fetched   | leased | an order to check | checking                                                                 |
| checking  | leased | `Check`           | certified, or absent                                                     |
| certified | leased | nothing           | requests use it. `vanished`, `engine_failed`: looking. Idle: evicting    |
| evicting  | no     | `Evict`           | None: absent. `Held`, `Failure`: its folder and lease stay               |

`Held` says that a folder exists, and hands over its lease: there is no moment in which it could be evicted. A folder
with another inode than the held one replaces it, and all knowledge about the old one is void. An answer to an effect
that nobody waits for any more is dropped, and its lease is released.
"""
