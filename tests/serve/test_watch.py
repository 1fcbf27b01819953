"""Versions that come, change and go, seen by a watcher that is told when to look."""

import asyncio
import shutil

import fake_models
import pytest
from small_models import small, write_uncompared

from hotloop.errors import ModelError, OptionError
from hotloop.serve.figures import Figures
from hotloop.serve.models import Models
from hotloop.serve.refusal import NotFound, Unready
from hotloop.serve.watch import Watcher, find_versions


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Versions 1 and 2 of a model, out of sight of the server; tests copy them."""
    folder = tmp_path_factory.mktemp("store")
    write_uncompared(folder, small(seed=0), small(seed=1), ladder=(1,))
    return folder / "small"


async def load_and_watch(*folders, say=lambda text: None):
    models = Models(Figures())
    watcher = Watcher(models, folders, say)
    await watcher.load_all()
    return models, watcher


def damage(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def test_a_new_version_takes_over_a_damaged_one_is_refused_and_one_that_is_gone_ends(store, tmp_path):
    place = tmp_path / "served" / "small"
    shutil.copytree(store / "1", place / "1")
    said = []

    async def main():
        models, watcher = await load_and_watch(place.parent, say=said.append)
        assert models.is_ready and models.versions("small") == [1]
        shutil.copytree(store / "2", place / "2")
        await watcher.look()
        assert models.find("small").key == ("small", 2) and models.find("small", "1").key == ("small", 1)
        old = models.find("small", "2")
        for file in ("program.bin", "weights.safetensors", "examples.npz", "model.json"):
            shutil.rmtree(place / "2")
            shutil.copytree(store / "2", place / "2")
            damage(place / "2" / file)
            said.clear()
            await watcher.look()
            assert len(said) == 1 and said[0].startswith("refused ") and models.find("small", "2") is old
            await watcher.look()
            assert len(said) == 1  # not again while it stays as it is
        shutil.rmtree(place / "1")
        await watcher.look()
        assert models.versions("small") == [2]
        with pytest.raises(NotFound):
            models.find("small", "1")
        shutil.rmtree(place / "2")
        await watcher.look()
        assert models.find("small") is old  # the last one stays
        shutil.copytree(store / "1", place / "3")
        (place / "4").mkdir()  # nothing in it yet
        await watcher.look()
        assert models.versions("small") == [3]
        await asyncio.sleep(0)  # the old one's end begins beside
        with pytest.raises(Unready):
            old.batcher.enter()
        await models.end()

    asyncio.run(main())


def test_a_replaced_version_takes_over_and_the_old_one_ends_its_requests(store, tmp_path):
    place = tmp_path / "served" / "small"
    shutil.copytree(store / "1", place / "1")

    async def main():
        models, watcher = await load_and_watch(place.parent)
        old = models.find("small")
        with old.batcher.enter() as ticket:
            shutil.rmtree(place / "1")
            shutil.copytree(store / "2", place / "1")
            await watcher.look()
            new = models.find("small")
            assert new is not old
            given = {"x": small().examples["x"]}
            answers = [(await ticket.answer(given)).outputs["shares"]]
        with new.batcher.enter() as ticket:
            answers.append((await ticket.answer(given)).outputs["shares"])
        await models.end()
        return answers

    first, second = asyncio.run(main())
    assert abs(first - second).max() > 0.01


def test_the_last_version_of_a_model_stays_where_another_model_is_there(store, tmp_path):
    place = tmp_path / "served"
    shutil.copytree(store / "1", place / "small" / "1")
    write_uncompared(place, small(name="other"), ladder=(1,))
    said = []

    async def main():
        models, watcher = await load_and_watch(place, say=said.append)
        shutil.rmtree(place / "small")
        said.clear()
        for _ in range(2):
            await watcher.look()
            assert models.versions("small") == [1] and models.versions("other") == [1]
        assert len(said) == 1 and said[0].startswith("kept small version 1")
        shutil.copytree(store / "2", place / "small" / "2")
        await watcher.look()
        assert models.versions("small") == [2]
        await models.end()

    asyncio.run(main())


def test_a_folder_that_was_away_for_a_while_is_there_as_before(store, tmp_path):
    place, away = tmp_path / "served", tmp_path / "away"
    shutil.copytree(store / "1", place / "small" / "1")
    write_uncompared(place, small(name="other"), ladder=(1,))

    async def main():
        models, watcher = await load_and_watch(place)
        first = models.find("small")
        (place / "small").rename(away)
        await watcher.look()
        away.rename(place / "small")
        await watcher.look()
        shutil.copytree(store / "2", place / "small" / "2")
        await watcher.look()
        assert models.versions("small") == [1, 2] and models.find("small", "1") is first
        await models.end()

    asyncio.run(main())


def test_of_versions_that_go_together_the_newest_stays(store, tmp_path):
    place = tmp_path / "served"
    write_uncompared(place, small(name="other"), ladder=(1,))
    shutil.copytree(store / "2", place / "small" / "2")

    async def main():
        models, watcher = await load_and_watch(place)
        shutil.copytree(store / "1", place / "small" / "1")
        await watcher.look()
        shutil.rmtree(place / "small")
        await watcher.look()
        assert models.versions("small") == [2]
        await models.end()

    asyncio.run(main())


def test_a_version_that_is_wrong_in_a_way_of_its_own_stops_no_other(store, tmp_path, monkeypatch):
    place = tmp_path / "served" / "small"
    shutil.copytree(store / "1", place / "1")
    said, load = [], Models.load

    async def load_or_fail(self, folder):
        if folder.name == "2":
            raise RuntimeError("RESOURCE_EXHAUSTED:\nout of memory")
        return await load(self, folder)

    async def main():
        models, watcher = await load_and_watch(place, say=said.append)
        monkeypatch.setattr(Models, "load", load_or_fail)
        for number in ("2", "3"):
            shutil.copytree(store / "2", place / number)
        said.clear()
        await watcher.look()
        assert models.versions("small") == [1, 3]
        await models.end()

    asyncio.run(main())
    assert said[0] == f"refused {place / '2'}: RESOURCE_EXHAUSTED: out of memory"


def test_a_look_that_fails_is_said_once_and_the_next_one_is_made(store, monkeypatch):
    said, looks = [], []

    async def look(self):
        looks.append(1)
        raise PermissionError("not yours")

    monkeypatch.setattr(Watcher, "look", look)

    async def main():
        watching = asyncio.create_task(Watcher(Models(Figures()), [store], said.append).watch(0.001))
        while len(looks) < 3:
            await asyncio.sleep(0.001)
        watching.cancel()

    asyncio.run(main())
    assert said == ["nothing is changed: PermissionError: not yours"]


def test_what_is_damaged_at_the_start_is_an_error(store, tmp_path):
    place = tmp_path / "served" / "small"
    shutil.copytree(store / "1", place / "1")
    damage(place / "1" / "weights.safetensors")

    async def main():
        await Watcher(Models(Figures()), [place.parent], lambda text: None).load_all()

    with pytest.raises(ModelError, match=r"weights\.safetensors"):
        asyncio.run(main())


def test_folders_of_models_and_of_one_model(store, tmp_path):
    above, itself = find_versions([store.parent]), find_versions([store])
    assert above == itself and set(above) == {("small", 1), ("small", 2)}
    with pytest.raises(OptionError, match="is also in"):
        shutil.copytree(store, tmp_path / "other" / "small")
        find_versions([store, tmp_path / "other"])
    with pytest.raises(OptionError, match="no model is in it"):
        find_versions([tmp_path / "other" / "small" / "1"])


def test_a_folder_in_trouble_is_as_it_was_and_the_others_are_looked_at(store, tmp_path):
    """It is empty where a disk is not mounted; a model whose name is there twice is left alone as well."""
    first, second = tmp_path / "first", tmp_path / "second"
    shutil.copytree(store, first / "small")
    write_uncompared(second, small(name="other"), ladder=(1,))
    said = []

    async def main():
        models, watcher = await load_and_watch(first, second, say=said.append)
        first.rename(tmp_path / "away")
        shutil.copytree(second / "other" / "1", second / "other" / "2")
        for make in (lambda: None, first.mkdir):
            make()
            said.clear()
            await watcher.look()
            await watcher.look()
            assert models.versions("small") == [1, 2] and models.versions("other") == [1, 2]
            warnings = [line for line in said if not line.startswith("loaded other version 2")]
            assert len(warnings) == 1 and warnings[0].startswith(f"nothing is changed: {first}: no ")
        said.clear()
        first.rmdir()
        (tmp_path / "away").rename(first)
        shutil.copytree(store, second / "small")
        shutil.rmtree(second / "small" / "2")
        shutil.rmtree(second / "other" / "1")
        old = models.find("small", "1")
        await watcher.look()
        assert models.versions("small") == [1, 2] and models.find("small", "1") is old
        assert "the model small is also in" in said[0] and models.versions("other") == [2]
        shutil.rmtree(second / "small")
        shutil.rmtree(first / "small" / "1")
        await watcher.look()
        assert models.versions("small") == [2]
        await models.end()

    asyncio.run(main())


def test_figures_of_a_version_that_is_gone_or_was_refused_are_dropped_after_a_while(
    store, tmp_path, monkeypatch
):
    place = tmp_path / "served" / "small"
    shutil.copytree(store, place)
    monkeypatch.setattr("hotloop.serve.models.KEEP_FIGURES", 0.05)

    async def main():
        models, watcher = await load_and_watch(place)
        figures = models.figures
        shutil.copytree(store / "1", place / "3")
        damage(place / "3" / "program.bin")
        await watcher.look()
        for number in (1, 2):
            with models.find("small", str(number)).batcher.enter() as ticket:
                await ticket.answer({"x": small().examples["x"]})
            figures.count_request("small", number, 200, 0.1)
            figures.count_request("small", number, 400, 0.1)
            figures.count_decode("small", number, 0.1)
        for number in (1, 3):
            shutil.rmtree(place / str(number))
        await watcher.look()
        before = figures.as_text().decode()
        await asyncio.sleep(0.1)
        after = figures.as_text().decode()
        stats = [each.version for each in figures.all()]
        await models.end()
        return before, after, stats

    before, after, stats = asyncio.run(main())
    for number in (1, 3):
        assert f'version="{number}"' in before and f'version="{number}"' not in after
    kept = [line for line in before.splitlines() if 'version="2"' in line]
    assert len(kept) > 70 and all(line in after for line in kept) and stats == [2]


def test_a_version_that_comes_back_keeps_its_figures(store, tmp_path):
    place = tmp_path / "served" / "small"
    shutil.copytree(store, place)

    async def main():
        models, watcher = await load_and_watch(place)
        models.figures.count_request("small", 1, 200, 0.1)
        shutil.rmtree(place / "1")
        await watcher.look()
        assert list(models._forgetting) == [("small", 1)]
        shutil.copytree(store / "1", place / "1")
        await watcher.look()
        assert not models._forgetting and models.figures.of("small", 1).answered == 1
        await models.end()

    asyncio.run(main())


def test_states_of_versions_that_load_answer_end_and_were_refused(store, tmp_path, monkeypatch):
    place = tmp_path / "served" / "small"
    shutil.copytree(store / "1", place / "1")
    models, states, load = Models(Figures()), [], Models.load

    async def look_and_load(self, folder):
        states.append(dict(self.states()))
        return await load(self, folder)

    monkeypatch.setattr(Models, "load", look_and_load)

    async def main():
        watcher = Watcher(models, [place], lambda text: None)
        await watcher.load_all()
        shutil.copytree(store / "2", place / "2")
        damage(place / "2" / "weights.safetensors")
        await watcher.look()
        states.append(models.states())
        with models.find("small").batcher.enter():
            shutil.rmtree(place / "2")
            shutil.rmtree(place / "1")
            shutil.copytree(store / "2", place / "3")
            await watcher.look()
            states.append(models.states())
        await models.end()

    asyncio.run(main())
    words = [{number: state.word for (_, number), state in each.items()} for each in states]
    assert words == [
        {1: "LOADING"},
        {1: "READY", 2: "LOADING"},
        {1: "READY", 2: "UNAVAILABLE"},
        {1: "READY", 2: "UNAVAILABLE", 3: "LOADING"},
        {1: "UNLOADING", 3: "READY"},
    ]
    reason = states[2]["small", 2].reason
    assert reason.startswith("small/2/weights.safetensors: ") and str(tmp_path) not in reason


def test_a_version_that_is_loading_is_not_unknown():
    models, _ = fake_models.make_models()
    models.expect({("new", 1)})
    with pytest.raises(Unready, match="the model new is being loaded"):
        models.find("new")
    with pytest.raises(NotFound, match="did you mean new"):
        models.find("news")
    with pytest.raises(NotFound):
        models.find("new", "2")
