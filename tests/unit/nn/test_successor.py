"""Laws of the successor model: its greedy text is the given table, whatever was said before."""

import random

import pytest
from tokenizers import Tokenizer

from fakes.models import make_successor, make_successor_text
from fakes.steps import Driver, open_model, reference


@pytest.mark.parametrize("seed", range(3))
def test_greedy_text_follows_the_table(tmp_path, seed):
    """A random table with forks that join again; a token that is not named leads to the default."""
    rng = random.Random(seed)
    following = {token: rng.randrange(288) for token in rng.sample(range(288), 200)}
    config, program = open_model(make_successor(tmp_path, following))
    chosen = reference(program)
    for row in range(4):
        driver = Driver(chosen, config, seed=row)
        prompt = [rng.randrange(288) for _ in range(rng.randint(1, 20))]
        driver.add(row, prompt)
        expected, token = [], prompt[-1]
        for _ in range(25):
            token = following.get(token, 257)
            expected.append(token)
        assert driver.generate(row, 25) == expected


def test_pieces_come_out_one_token_each_and_then_the_end(tmp_path):
    """A family emoji, split inside its characters, and text."""
    emoji = "👨‍👩‍👧".encode()
    pieces = [emoji[:2], emoji[2:7], emoji[7:], b" is a", b" family."]
    config, program = open_model(make_successor_text(tmp_path, pieces))
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    driver = Driver(reference(program), config)
    driver.add(0, tokenizer.encode("What is it?").ids)
    tokens = driver.generate(0, 6)
    assert tokens == [260, 261, 262, 263, 264, 257]
    assert tokenizer.decode(tokens[:-1]) == "👨‍👩‍👧 is a family."


def test_a_piece_that_comes_twice_is_refused(tmp_path):
    with pytest.raises(ValueError, match="distinct"):
        make_successor_text(tmp_path, [b"ab", b"ab"])
