"""The data sources: no leak from the future, files that are not what they should be, and the true probabilities."""

from pathlib import Path

import numpy as np
import pytest
import torch
from ranking import movielens, synthetic
from ranking.errors import InputError
from ranking.metrics import normalized_entropy
from ranking.requests import FEATURES, UNSEEN, Dataset, Hide, Requests, Schema, age_bucket, make_batch
from ranking.synthetic import SyntheticConfig


def history(requests: Requests, i: int) -> slice:
    return slice(requests.history_start[i], requests.history_stop[i])


def test_movielens_history_is_the_users_strictly_earlier_ratings(ratings_file: Path) -> None:
    raw = movielens.read_ratings(ratings_file)
    cut = 1080
    dataset = movielens.split(raw, cut)
    seen = sorted(set(raw[raw[:, 3] < cut, 1]))
    item_id = {item: seen.index(item) + 1 if item in seen else UNSEEN for item in raw[:, 1]}
    users = sorted(set(raw[raw[:, 3] < cut, 0]))
    checked = 0
    for part in (dataset.train, dataset.held_out):
        for i in range(len(part)):
            assert (part.event_time[history(part, i)] < part.time[i]).all()
            rows = slice(part.candidate_offsets[i], part.candidate_offsets[i + 1])
            if part.user[i] == UNSEEN:
                continue
            mine = raw[raw[:, 0] == users[part.user[i] - 1]]
            earlier, now = mine[mine[:, 3] < part.time[i]], mine[mine[:, 3] == part.time[i]]
            expected = sorted((t, item_id[item], r) for _, item, r, t in earlier)
            got = [a[history(part, i)].tolist() for a in (part.event_time, part.event_item, part.event_rating)]
            assert sorted(zip(*got, strict=True)) == expected
            assert sorted(part.candidate_item[rows]) == sorted(item_id[item] for item in now[:, 1])
            assert part.label[rows].sum() == (now[:, 2] >= 4).sum()
            checked += 1
    assert checked > 100


def test_movielens_is_split_by_time_and_every_rating_is_one_candidate(ratings_file: Path) -> None:
    raw = movielens.read_ratings(ratings_file)
    dataset = movielens.load(ratings_file)
    assert dataset.train.time.max() < dataset.held_out.time.min()
    assert len(dataset.train.label) + len(dataset.held_out.label) == len(raw)
    validation = movielens.load(ratings_file, "validation")
    assert validation.held_out.time.max() < dataset.held_out.time.min()
    assert validation.train.time.max() < validation.held_out.time.min()
    assert len(validation.train.label) + len(validation.held_out.label) == len(dataset.train.label)


def test_movielens_gives_what_training_does_not_see_one_id() -> None:
    ratings = np.array([[5, 71, 4, 10], [5, 73, 2, 20], [6, 79, 5, 30], [5, 83, 5, 40], [9, 71, 3, 50]])
    dataset = movielens.split(ratings, cut=30)
    assert (dataset.schema.num_items, dataset.schema.num_users) == (3, 2)
    assert dataset.train.candidate_item.tolist() == [1, 2]
    assert dataset.held_out.candidate_item.tolist() == [UNSEEN, UNSEEN, 1]
    assert dataset.held_out.user.tolist() == [1, UNSEEN, UNSEEN]


def test_movielens_keeps_the_last_200_events() -> None:
    ratings = np.array([[1, 1 + i, 4, i] for i in range(307)])
    held_out = movielens.split(ratings, cut=300).held_out
    assert (held_out.history_stop - held_out.history_start).tolist() == [200] * 7
    assert held_out.event_time[history(held_out, 0)].tolist() == list(range(100, 300))


def test_movielens_file_is_found_in_recbole_and_has_its_known_size() -> None:
    ratings = movielens.read_ratings(movielens.find_file())
    assert ratings.shape == (100_000, 4)
    assert [len(np.unique(ratings[:, i])) for i in range(3)] == [943, 1682, 5]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("1\t2\t3", "must have 4 tab-separated fields, got 3"),
        ("1\t2\tthree\t4", "rating must be a number, got 'three'"),
        ("1\t2\tnan\t4", "rating must be a whole number in [1, 5], got nan"),
        ("1\t2\t3.5\t4", "rating must be a whole number in [1, 5], got 3.5"),
        ("1\t2\t3\tinf", "timestamp must be a whole number"),
        ("1\t1683\t3\t4", "item_id must be a whole number in [1, 1682], got 1683"),
        ("0\t2\t3\t4", "user_id must be a whole number in [1, 943], got 0"),
        ("", "must have 4 tab-separated fields, got 1"),
    ],
)
def test_malformed_ratings_are_named_with_file_and_line(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "bad.inter"
    path.write_text(f"{movielens.HEADER}\n1\t2\t3\t4\n{line}\n")
    with pytest.raises(InputError) as caught:
        movielens.read_ratings(path)
    assert str(caught.value).startswith(f"{path}:3: {message}")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", ":1: must be the header"),
        (b"user,item\n1,2\n", ":1: must be the header"),
        (b"\xff\xfe\x00", "it is not UTF-8 text"),
        (f"{movielens.HEADER}\n".encode(), "must hold ratings from before and after a split by time, got 0"),
        (
            f"{movielens.HEADER}\n1\t1\t1\t1\n".encode(),
            "must hold ratings from before and after a split by time, got 1",
        ),
    ],
)
def test_files_that_are_not_movielens_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "bad.inter"
    path.write_bytes(content)
    with pytest.raises(InputError, match=message):
        movielens.load(path)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no\.inter: cannot be read: No such file"):
        movielens.load(tmp_path / "no.inter")


def test_synthetic_log_is_decided_by_its_seed(small_log: Dataset) -> None:
    config = SyntheticConfig(num_requests=400, max_length=61, median_length=13.0)
    again, other = synthetic.load(3, config=config), synthetic.load(4, config=config)
    for name in ("event_item", "candidate_item", "label", "probability"):
        np.testing.assert_array_equal(getattr(again.train, name), getattr(small_log.train, name))
    assert again.train.label.tolist() != other.train.label.tolist()


def test_synthetic_lengths_are_log_normal_with_a_cap_and_users_without_history() -> None:
    requests = synthetic.load(0, config=SyntheticConfig(num_requests=20_000, max_length=848)).train
    lengths = requests.history_stop - requests.history_start
    share = (lengths == 0).mean()
    logs = np.log(lengths[(lengths > 0) & (lengths < 848)])
    # Standard errors: share sqrt(0.03 · 0.97 / n), median 1.25 σ / sqrt(n), σ / sqrt(2 n); four of each, and rounding.
    n = len(lengths)
    assert abs(share - 0.03) < 4 * (0.03 * 0.97 / n) ** 0.5
    assert abs(np.median(logs) - np.log(75)) < 4 * 1.25 * 0.83 / n**0.5 + 1 / 75
    assert abs(logs.std() - 0.83) < 4 * 0.83 / (2 * n) ** 0.5 + 0.02
    assert lengths.max() == 848


def test_synthetic_items_follow_zipf() -> None:
    config = SyntheticConfig(num_requests=5000)
    counts = np.sort(np.bincount(synthetic.load(0, config=config).train.event_item, minlength=501)[1:])[::-1]
    assert counts[0] > 20 * counts[len(counts) // 2] > 0


def test_synthetic_probability_is_what_the_clicks_follow() -> None:
    log = synthetic.load(5)
    for part in (log.train, log.held_out):
        error = part.label - part.probability
        deviation = np.sqrt(part.probability * (1 - part.probability))
        # A sum of independent errors of known variance: four standard deviations, overall and in each tenth of p.
        for tenth in np.array_split(np.argsort(part.probability), 10):
            assert abs(error[tenth].sum()) < 4 * np.sqrt((deviation[tenth] ** 2).sum())


def test_synthetic_probability_follows_its_formula() -> None:
    """Two users, one interest each, worked out by hand from ages and categories."""
    config = SyntheticConfig(num_requests=3, num_categories=3, tau=2.0)
    category, user, age = np.array([0, 1, 1, 2]), np.array([0, 0, 0, 2]), np.array([3, 2, 1, 1])
    short, long = synthetic._affinities(config, category, user, age)
    weights = np.exp(-np.array([3, 2, 1]) / 2.0)
    np.testing.assert_allclose(short[0], [weights[0] / weights.sum(), weights[1:].sum() / weights.sum(), 0])
    np.testing.assert_allclose(long, [[1 / 3, 2 / 3, 0], [0, 0, 0], [0, 0, 1]])
    assert short[1].tolist() == [0, 0, 0]


def test_no_distortion_of_the_true_probabilities_scores_a_better_ne() -> None:
    held_out = synthetic.load(1).held_out
    label, p = torch.from_numpy(held_out.label), torch.from_numpy(held_out.probability)
    bayes = normalized_entropy(p, label)
    logit = torch.logit(p)
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(len(p), generator=generator, dtype=torch.float64)
    distorted = {
        "sharper": 1.3 * logit, "flatter": 0.7 * logit, "shifted": logit + 0.3, "noisy": logit + 0.3 * noise,
        "constant": torch.full_like(logit, torch.logit(label.double().mean()).item()),
    }  # fmt: skip
    for name, wrong in distorted.items():
        assert normalized_entropy(wrong.sigmoid(), label) > bayes, name


def test_validation_data_holds_nothing_of_the_test_part() -> None:
    config = SyntheticConfig(num_requests=100)
    test, validation = synthetic.load(0, config=config), synthetic.load(0, "validation", config)
    assert len(validation.train) + len(validation.held_out) == len(test.train) == 80
    both = np.concatenate([validation.train.candidate_item, validation.held_out.candidate_item])
    np.testing.assert_array_equal(both, test.train.candidate_item)


def tiny_requests(**changes: np.ndarray) -> Requests:
    columns = {
        "event_item": [3, 1, 4, 1, 5],
        "event_rating": [1, 2, 3, 4, 5],
        "event_time": [10, 12, 13, 20, 21],
        "user": [7, 0, 7],
        "time": [14, 30, 24],
        "history_start": [0, 5, 2],
        "history_stop": [3, 5, 5],
        "candidate_offsets": [0, 2, 3, 5],
        "candidate_item": [2, 6, 1, 3, 2],
        "label": np.array([1, 0, 1, 0, 0], dtype=np.float32),
    }
    return Requests(**{name: np.asarray(value) for name, value in {**columns, **changes}.items()})


SCHEMA = Schema(num_items=7, num_users=8, num_ratings=6, num_ages=5)


def test_batch_has_each_requests_events_and_candidates_in_order() -> None:
    batch = make_batch(tiny_requests(), np.array([2, 1, 0]), SCHEMA)
    features = {key: batch.features[key] for key in FEATURES}
    assert {key: jagged.lengths().tolist() for key, jagged in features.items()} == {
        **{key: [3, 0, 3] for key in FEATURES[:3]},
        **{key: [2, 1, 2] for key in FEATURES[3:]},
    }
    values = {key: jagged.values().tolist() for key, jagged in features.items()}
    assert values["history_item"] == [4, 1, 5, 3, 1, 4]
    assert values["history_rating"] == [3, 4, 5, 1, 2, 3]
    # Ages 11, 4, 3 and 4, 2, 1: two buckets a doubling, at most bucket 4.
    assert values["history_age"] == [4, 4, 3, 4, 2, 0]
    assert values["candidate_item"] == [3, 2, 1, 2, 6]
    assert values["user"] == [7, 7, 0, 7, 7]
    assert batch.label.tolist() == [0, 0, 1, 1, 0]


def test_age_buckets_double_every_two_and_end_at_the_last() -> None:
    assert age_bucket(np.array([0, 1, 2, 4, 8, 1000]), 13).tolist() == [0, 0, 2, 4, 6, 12]


def test_hiding_replaces_the_given_part_of_items_and_users_only() -> None:
    index = np.tile(np.arange(3), 500)
    hide = Hide(np.random.default_rng(0), items=0.3, users=1.0)
    plain, hidden = make_batch(tiny_requests(), index, SCHEMA), make_batch(tiny_requests(), index, SCHEMA, hide)
    for key in FEATURES:
        before, after = plain.features[key].values(), hidden.features[key].values()
        changed = before != after
        assert (after[changed] == UNSEEN).all()
        rate = changed[before != UNSEEN].double().mean().item()
        expected = {"history_item": 0.3, "candidate_item": 0.3, "user": 1.0}.get(key, 0.0)
        assert abs(rate - expected) <= 4 * (expected * (1 - expected) / len(before)) ** 0.5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"candidate_item": [2, 6, 1, 7, 2]}, r"candidate item id must be in \[0, 7\), got 7 in row 3"),
        ({"event_item": [3, -1, 4, 1, 5]}, r"item id of an event must be in \[0, 7\), got -1 in row 1"),
        ({"user": [7, 0, 8]}, r"user id must be in \[0, 8\), got 8 in row 2"),
        ({"label": np.array([1, 0, np.nan, 0, 0], dtype=np.float32)}, "label must be finite, got nan in row 2"),
        ({"probability": np.array([0.1, np.nan, 1, 0, 0])}, "click probability must be finite, got nan in row 1"),
    ],
)
def test_ids_out_of_range_and_nan_are_named(changes: dict[str, np.ndarray], message: str) -> None:
    with pytest.raises(InputError, match=message):
        tiny_requests(**changes).validate(SCHEMA)


def test_selection_keeps_each_requests_candidates_together() -> None:
    chosen = tiny_requests(probability=np.arange(5) / 10).select(np.array([2, 0]))
    assert chosen.candidate_offsets.tolist() == [0, 2, 4]
    assert chosen.candidate_item.tolist() == [3, 2, 2, 6]
    assert chosen.probability.tolist() == [0.3, 0.4, 0.0, 0.1]
    assert chosen.history_stop.tolist() == [5, 3]
