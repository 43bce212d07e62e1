"""Adapters on volumes that tenants write to. No path leads out of its volume or out of a tenant's folder."""

import os
import shutil

import pytest

from motet.digest import adapter_digest
from motet.errors import AdapterFetchFailed
from tests.support.in_process_runner import write_adapter


@pytest.fixture
def volumes(tmp_path, fetch_setup):
    root = tmp_path / "volumes"
    root.mkdir()
    fetch_setup.settings["volumes"] = str(root)
    write_adapter(root / "mine" / "pirate")
    write_adapter(root / "theirs" / "poet", seed=1)
    return root


async def test_an_adapter_comes_from_a_volume_and_is_copied_once(volumes, fetch_setup):
    source = (volumes / "mine/pirate").as_uri()
    fetched = await fetch_setup.fetch(source)
    assert fetched.digest == adapter_digest(volumes / "mine/pirate")
    shutil.rmtree(volumes / "mine")
    again = await fetch_setup.fetch(source, expected=fetched.digest)
    assert again.folder == fetched.folder
    assert fetch_setup.fetcher.copies == 1


@pytest.mark.parametrize("path", ["/etc", "{root}", "{root}/mine/../theirs/poet", "{root}/../volumes/mine/pirate"])
async def test_row_32_a_path_that_leaves_the_volumes_is_refused(volumes, fetch_setup, path):
    with pytest.raises(AdapterFetchFailed, match="is not on a volume of this pool") as failed:
        await fetch_setup.fetch("file://" + path.format(root=volumes))
    assert failed.value.retry_after == 0


async def test_in_a_cluster_only_volumes_are_read_whatever_the_chart_says(fetch_setup, tmp_path):
    fetch_setup.settings["KUBERNETES_SERVICE_HOST"] = "10.0.0.1"
    with pytest.raises(AdapterFetchFailed, match="is not on a volume"):
        await fetch_setup.fetch(write_adapter(tmp_path / "a").as_uri())


@pytest.mark.parametrize("target", ["../theirs/poet", "../nowhere", "/etc", "{root}/theirs/poet"])
async def test_row_32_a_folder_that_is_a_link_out_of_its_volume_is_refused(volumes, fetch_setup, target):
    link = volumes / "mine" / "link"
    link.symlink_to(target.format(root=volumes))
    if target == "/etc":
        write_adapter(volumes / "etc")
        link.unlink()
        link.symlink_to(volumes / "etc")
    with pytest.raises(AdapterFetchFailed, match="a link that leads out of its volume") as failed:
        await fetch_setup.fetch(link.as_uri())
    assert failed.value.retry_after == 0
    assert fetch_setup.cached() == []


@pytest.mark.parametrize("target", ["../../theirs/poet/adapter_config.json", "/etc/hostname", "/nowhere", "../../x"])
async def test_an_optional_file_that_is_a_link_out_of_its_volume_is_refused_whether_there_is_anything(
    volumes, fetch_setup, target
):
    (volumes / "mine/pirate/chat_template.jinja").symlink_to(target)
    with pytest.raises(AdapterFetchFailed, match="a link that leads out of its volume"):
        await fetch_setup.fetch((volumes / "mine/pirate").as_uri())
    assert fetch_setup.cached() == []


async def test_an_optional_file_may_be_a_link_inside_its_volume(volumes, fetch_setup):
    (volumes / "mine/template").write_text("{{ messages }}")
    (volumes / "mine/pirate/chat_template.jinja").symlink_to("../template")
    fetched = await fetch_setup.fetch((volumes / "mine/pirate").as_uri())
    copied = fetched.folder / "chat_template.jinja"
    assert (copied.is_symlink(), copied.read_text()) == (False, "{{ messages }}")


async def test_row_32_a_file_that_is_a_link_out_of_its_volume_is_refused(volumes, fetch_setup):
    weights = volumes / "mine/pirate/adapter_model.safetensors"
    weights.unlink()
    weights.symlink_to(volumes / "theirs/poet/adapter_model.safetensors")
    with pytest.raises(AdapterFetchFailed, match="a link that leads out of its volume"):
        await fetch_setup.fetch((volumes / "mine/pirate").as_uri())


async def test_links_inside_a_volume_are_followed(volumes, fetch_setup):
    weights = volumes / "mine/pirate/adapter_model.safetensors"
    weights.rename(volumes / "mine/blob")
    weights.symlink_to("../blob")
    assert (await fetch_setup.fetch((volumes / "mine/pirate").as_uri())).bytes


@pytest.fixture
def shared(tmp_path, fetch_setup):
    """A volume of two tenants, as in a cluster and as on a laptop, where no setting names volumes."""
    volume = tmp_path / "volumes" / "shared"
    write_adapter(volume / "acme" / "pirate")
    write_adapter(volume / "zeta" / "poet", seed=1)
    return volume


@pytest.fixture(params=["cluster", "laptop"])
def acme(request, shared, fetch_setup):
    """Fetch an adapter for acme, as the operator orders it."""
    if request.param == "cluster":
        fetch_setup.settings["volumes"] = str(shared.parent)

    def fetch(path: str, *, folder: str = "acme", **how):
        return fetch_setup.fetch(f"file://{shared}/{path}", volume=f"file://{shared}", folder=folder, **how)

    return fetch


async def test_a_tenant_may_read_its_own_folder(shared, acme):
    assert (await acme("acme/pirate")).digest == adapter_digest(shared / "acme/pirate")


@pytest.mark.parametrize(
    "path", ["zeta/poet", "acme/../zeta/poet", "acme/pirate/../../zeta/poet", "acme-2/poet", "zeta", "", "../shared"]
)
async def test_row_32_a_path_outside_of_a_tenants_folder_is_refused(shared, acme, fetch_setup, path):
    with pytest.raises(AdapterFetchFailed, match=r"is (outside of the folder acme|not on a volume)") as failed:
        await acme(path)
    assert failed.value.retry_after == 0
    assert fetch_setup.cached() == []


@pytest.mark.parametrize("folder", ["acme/../zeta", "..", "/etc", "/"])
async def test_no_folder_leads_out_of_its_volume(shared, acme, folder):
    with pytest.raises(AdapterFetchFailed, match="is outside of the folder"):
        await acme("zeta/poet", folder=folder)


@pytest.mark.parametrize("target", ["../zeta/poet", "../zeta/none", "{volume}/zeta/poet", "../../shared/zeta/poet"])
async def test_row_32_a_link_from_a_tenants_folder_into_anothers_is_refused(shared, acme, fetch_setup, target):
    (shared / "acme/link").symlink_to(target.format(volume=shared))
    with pytest.raises(AdapterFetchFailed, match="a link that leads out of the folder acme of its volume") as failed:
        await acme("acme/link")
    assert failed.value.retry_after == 0
    assert fetch_setup.cached() == []


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json"])
async def test_row_32_a_file_that_is_a_link_to_another_tenants_is_refused(shared, acme, name):
    file = shared / "acme/pirate" / name
    file.unlink()
    file.symlink_to(f"../../zeta/poet/{name}")
    with pytest.raises(AdapterFetchFailed, match="a link that leads out of the folder acme of its volume"):
        await acme("acme/pirate")


async def test_row_32_a_tenants_folder_that_is_itself_a_link_moves_no_bounds(shared, acme):
    (shared / "acme/out").symlink_to("../zeta")
    with pytest.raises(AdapterFetchFailed, match="a link that leads out of the folder acme/out of its volume"):
        await acme("acme/out/poet", folder="acme/out")


@pytest.mark.parametrize("what", ["poet", "none", "layout"])
async def test_a_link_into_another_tenants_folder_does_not_reveal_what_exists(shared, acme, what):
    (shared / "zeta/layout/snapshots/c1").mkdir(parents=True)
    (shared / "acme/link").symlink_to(f"../zeta/{what}")
    with pytest.raises(AdapterFetchFailed) as failed:
        await acme("acme/link")
    assert str(failed.value) == (
        f"{shared}/acme/link is a link that leads out of the folder acme of its volume. Copy the files there instead."
    )


@pytest.mark.parametrize("what", ["poet", "none"])
@pytest.mark.parametrize("link", ["snapshots", "snapshots/main"])
async def test_a_hubs_snapshots_in_another_tenants_folder_do_not_reveal_what_exists(shared, acme, link, what):
    (shared / "acme/hub" / link).parent.mkdir(parents=True)
    (shared / "zeta/poet/main").mkdir()
    (shared / "acme/hub" / link).symlink_to(shared / "zeta" / what)
    with pytest.raises(AdapterFetchFailed) as failed:
        await acme("acme/hub")
    assert str(failed.value) == (
        f"{shared}/acme/hub/{link} is a link that leads out of the folder acme of its volume. Copy the files there "
        "instead."
    )


@pytest.mark.parametrize("path", ["loop", "loop/inside", "x" * 300])
async def test_a_folder_that_cannot_be_read_is_the_tenants_fault(shared, acme, path):
    """Not a defect of the runner, and no failure of its disk"""
    (shared / "acme/loop").symlink_to("loop")
    with pytest.raises(AdapterFetchFailed, match=r"There is no folder|can't be read|has no adapter_config|leads to it"):
        await acme(f"acme/{path}")


async def test_links_inside_a_tenants_folder_are_followed(shared, acme):
    (shared / "acme/latest").symlink_to("pirate")
    assert (await acme("acme/latest")).digest == adapter_digest(shared / "acme/pirate")


async def test_the_volume_itself_may_be_reached_over_a_link(tmp_path, shared, fetch_setup):
    (tmp_path / "claims").symlink_to(shared.parent)
    volume = f"file://{tmp_path}/claims/shared"
    assert await fetch_setup.fetch(f"{volume}/acme/pirate", volume=volume, folder="acme")
    with pytest.raises(AdapterFetchFailed, match="is outside of the folder acme"):
        await fetch_setup.fetch(f"{volume}/zeta/poet", volume=volume, folder="acme")


async def test_a_cached_adapter_is_checked_again_when_a_folder_is_required(shared, acme):
    (shared / "acme/link").symlink_to("../zeta/poet")
    stolen = await acme("acme/link", folder="")
    with pytest.raises(AdapterFetchFailed, match="leads out of the folder acme"):
        await acme("acme/link", expected=stolen.digest)


async def test_a_fifo_on_a_volume_does_not_block(volumes, fetch_setup):
    weights = volumes / "mine/pirate/adapter_model.safetensors"
    weights.unlink()
    os.mkfifo(weights)
    with pytest.raises(AdapterFetchFailed, match="is not a regular file"):
        await fetch_setup.fetch((volumes / "mine/pirate").as_uri())


async def test_a_link_to_itself_is_named(volumes, fetch_setup):
    weights = volumes / "mine/pirate/adapter_model.safetensors"
    weights.unlink()
    weights.symlink_to(weights)
    with pytest.raises(AdapterFetchFailed, match="leads to itself"):
        await fetch_setup.fetch((volumes / "mine/pirate").as_uri())


async def test_a_huge_sparse_file_is_refused_unread(volumes, fetch_setup):
    os.truncate(volumes / "mine/pirate/adapter_model.safetensors", 1 << 40)
    with pytest.raises(AdapterFetchFailed, match="reads at most 1048576") as failed:
        await fetch_setup.fetch((volumes / "mine/pirate").as_uri())
    assert failed.value.reason == "TooLarge"


async def test_a_folder_missing_on_the_volume_is_tried_again_after_minutes(volumes, fetch_setup):
    with pytest.raises(AdapterFetchFailed, match="There is no folder") as failed:
        await fetch_setup.fetch((volumes / "mine/later").as_uri())
    assert failed.value.retry_after == pytest.approx(300 * fetch_setup.scale, rel=0.25)


@pytest.fixture
def layout(volumes):
    """A volume in the layout of a hub's client: blobs, snapshots with links to them, and refs."""
    root = volumes / "mine" / "models--org--pirate"
    for commit, seed in (("c1", 1), ("c2", 2)):
        write_adapter(root / "snapshots" / commit, seed=seed)
        for path in list((root / "snapshots" / commit).iterdir()):
            blob = root / "blobs" / f"{commit}-{path.name}"
            blob.parent.mkdir(exist_ok=True)
            path.rename(blob)
            path.symlink_to(f"../../blobs/{blob.name}")
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text("c1")
    (root / "refs" / "v2").write_text("c2")
    return root


@pytest.mark.parametrize(
    ("inside", "revision", "commit"),
    [("", "", "c1"), ("", "main", "c1"), ("", "v2", "c2"), ("", "c2", "c2"), ("snapshots/c2", "", "c2")],
)
async def test_a_hubs_own_layout_on_a_volume_is_understood(layout, fetch_setup, inside, revision, commit):
    fetched = await fetch_setup.fetch((layout / inside).as_uri(), revision=revision)
    assert fetched.digest == adapter_digest(layout / "snapshots" / commit)


async def test_a_revision_that_the_layout_lacks_is_named(layout, fetch_setup):
    with pytest.raises(AdapterFetchFailed, match="no snapshot of the revision v9"):
        await fetch_setup.fetch(layout.as_uri(), revision="v9")
    with pytest.raises(AdapterFetchFailed, match="not a branch"):
        await fetch_setup.fetch(layout.as_uri(), revision="../../../../theirs")
