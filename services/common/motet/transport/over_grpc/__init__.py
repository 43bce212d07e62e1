"""The transport over gRPC: the only code that knows `grpc.aio`.

Each of these rules comes from a failure that we have seen:
- a cancelled handler raises CancelledError again, and a client call is cancelled by its context: otherwise grpc.aio
  leaks;
- a client of a Unix socket reconnects as soon as the socket is served again; the back-off of gRPC takes more than a
  second;
- each reconnect resolves the name again, and a peer whose machine is gone is noticed within ten seconds;
- channels are made after the process has started, never before a fork.
"""

from motet.transport.over_grpc.channels import open_channel, socket_path
from motet.transport.over_grpc.network import GrpcNetwork
from motet.transport.over_grpc.server import is_healthy, serving
from motet.transport.over_grpc.streams import GrpcServerStream

__all__ = ["GrpcNetwork", "GrpcServerStream", "is_healthy", "open_channel", "serving", "socket_path"]
