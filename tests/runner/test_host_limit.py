"""Host memory for parked sequences: a share of the KV, and never more than the machine may give."""

from pathlib import Path

from motet_runner.memory.host_limit import available_host_bytes, default_host_bytes

GIB = 1 << 30


def test_all_kv_bytes_are_taken_only_where_the_machine_has_four_times_as_much() -> None:
    assert default_host_bytes(70 * GIB, share_of_kv=1, available=400 * GIB) == 70 * GIB
    assert default_host_bytes(70 * GIB, share_of_kv=1, available=128 * GIB) == 32 * GIB


def test_a_cpu_takes_a_share_of_the_kv() -> None:
    assert default_host_bytes(16 * GIB, share_of_kv=16, available=128 * GIB) == GIB


def test_the_limit_of_a_container_counts(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text(f"{300 << 20}\n")
    (tmp_path / "memory.current").write_text(f"{100 << 20}\n")
    assert available_host_bytes(tmp_path) == 200 << 20


def test_files_that_the_container_has_read_make_room(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text(f"{300 << 20}\n")
    (tmp_path / "memory.current").write_text(f"{290 << 20}\n")
    (tmp_path / "memory.stat").write_text(f"anon {90 << 20}\nactive_file 0\ninactive_file {200 << 20}\nslab 7\n")
    assert available_host_bytes(tmp_path) == 210 << 20


def test_a_container_without_a_limit_has_the_memory_of_the_machine(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("100\n")
    assert available_host_bytes(tmp_path) > 200 << 20


def test_the_limits_around_a_systemd_unit_count(tmp_path: Path) -> None:
    unit, own = tmp_path / "user.slice" / "motet.service", tmp_path / "own"
    unit.mkdir(parents=True)
    own.write_text("1:memory:/other\n0::/user.slice/motet.service\n")
    (unit / "memory.max").write_text("max\n")
    (unit / "memory.current").write_text(f"{50 << 20}\n")
    (unit.parent / "memory.max").write_text(f"{300 << 20}\n")
    (unit.parent / "memory.current").write_text(f"{100 << 20}\n")
    assert available_host_bytes(tmp_path, own) == 200 << 20
    (unit / "memory.max").write_text(f"{70 << 20}\n")
    assert available_host_bytes(tmp_path, own) == 20 << 20


def test_a_group_that_the_container_cannot_see_leaves_its_outermost(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("0::/kubepods/pod7\n")
    (tmp_path / "memory.max").write_text(f"{300 << 20}\n")
    (tmp_path / "memory.current").write_text(f"{100 << 20}\n")
    assert available_host_bytes(tmp_path, own) == 200 << 20
