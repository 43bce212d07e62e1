"""What surrounds simulated processes. It knows nothing of Motet's services but the protocols that they talk through."""

from motet_simulator.world.network import SimulatedNetwork
from motet_simulator.world.process import Process
from motet_simulator.world.surroundings import SimulatedDisk, surroundings_of
from motet_simulator.world.time import TimeStandsStill, World
from motet_simulator.world.wires import Wires

__all__ = ["Process", "SimulatedDisk", "SimulatedNetwork", "TimeStandsStill", "Wires", "World", "surroundings_of"]
