"""A recipe with a mistake is refused before anything runs, and the message names the remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from sameseed.errors import SameseedError
from sameseed_train.pipeline import run
from sameseed_train.recipe import RECIPES, DraftRecipe, HeadRecipe, load_own_recipe, load_recipe


@pytest.mark.parametrize("name", sorted(path.name for path in RECIPES.glob("*.toml")))
def test_the_projects_own_recipes_are_valid(name: str) -> None:
    own = {"embedded-parallel.toml": DraftRecipe}.get(name, HeadRecipe)
    recipe = load_recipe(Path(name)) if name == "embedded.toml" else load_own_recipe(own, Path(name))
    assert recipe.source and all(source.licence for source in recipe.source)
    names = {name for source in recipe.source for name in source.names}
    assert not any(name.startswith(("sgd", "topical-chat")) for name in names), "share-alike sources stay out"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("hidden_size = 32", "hiden_size = 32", "did you mean 'hidden_size'"),
        ("steps = 12", 'steps = "many"', "must be of type int"),
        ("steps = 12", "steps = true", "must be of type int"),
        ("steps = 12\n", "", "'steps' is missing"),
        ("steps = 12", "steps = 0", "steps"),
        ('kind = "chat"', 'kind = "chats"', "did you mean 'chat'"),
        ("max_mb = 0.002\n", "", "max_mb"),
        ('kind = "sums"\nmax_mb = 0.002', 'kind = "records"', "max_mb"),
        ('names = ["talk"]', "names = []", "needs 'file' and 'names'"),
        ("num_kv_heads = 2", "num_kv_heads = 3", "multiple of num_kv_heads"),
        ("head_dim = 8", "head_dim = 7", "must be even"),
        ("vocab_size = 320\nsample", "vocab_size = 300\nsample", "must equal tokenizer.vocab_size"),
        ("row_tokens = 64", "row_tokens = 1024", "exceeds shape.max_positions"),
        ("seed = 3", "seed = = 3", "no valid TOML"),
        ("warmup = 3", "warmup = 3\ndecay = 1.5", "decay must lie in 0..1"),
        ("threads = 1", "threads = -1", "threads must be at least 0"),
        ("batch = 8", "batch = 0", "batch must be at least 1"),
        ("[draft]", "[draft]\nbegin_layers = [2]", "layers of the target, 0 to 1"),
        ("[draft]", "[draft]\nbegin_layers = [1]", "leave out .draft.size"),
        ("[draft]", "[draft]\nparallel = 4", "draft.parallel: only for `sameseed train draft`"),
        ("[draft]", "[draft]\nbegin = 'a'\nmixture = 'b'\ntarget = 'c'", "draft.target, draft.begin, draft.mixture"),
        ("[draft.train]", "[draft.train]\ncompile = true", r"compile is for \[target.train\]; a draft's rows"),
        ("num_heads = 2\nnum_kv_heads = 1", "num_heads = 3\nnum_kv_heads = 2", "num_kv_heads"),
    ],
)
def test_bad_recipe(recipe_path: Path, old: str, new: str, message: str) -> None:
    text = recipe_path.read_text(encoding="utf-8")
    assert old in text
    recipe_path.write_text(text.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(SameseedError, match=message):
        load_recipe(recipe_path)


@pytest.mark.parametrize("lacking", ["", "talk.jsonl.gz", "valid.jsonl.gz"])
def test_lack_of_data_leaves_nothing(recipe_path: Path, data: Path, tmp_path: Path, lacking: str) -> None:
    """The same command can then be given again, without --resume."""
    (data / lacking).rename(tmp_path / "elsewhere")
    with pytest.raises(SameseedError, match="--data"):
        run(recipe_path, data=data, out=tmp_path / "out", quiet=True)
    assert not (tmp_path / "out").exists()
