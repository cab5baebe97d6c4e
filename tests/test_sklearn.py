"""`JrecClassifier` in scikit-learn's own tools."""

import pickle

import numpy as np
import pytest
from test_fit import LITTLE, frame

import jrec
from jrec.errors import JrecError

pytest.importorskip("sklearn")

from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import cross_val_score, train_test_split

from jrec.app.sklearn import JrecClassifier, JrecRegressor

QUICK = {"epochs": 2, "quick": True, "config": LITTLE["config"]}


def columns():
    rows = frame()
    return rows.drop(columns=["bought", "ts"]), rows["bought"]


def test_a_split_frame_is_learned_and_classes_have_their_names():
    train, test, wanted, truth = train_test_split(*columns(), random_state=0)
    classifier = JrecClassifier(**QUICK, seed=1).fit(train, wanted)
    assert classifier.classes_.tolist() == ["no", "yes"]
    assert classifier.feature_names_in_.tolist() == ["user", "item", "price"]
    chances = classifier.predict_proba(test)
    np.testing.assert_allclose(chances.sum(axis=1), 1, rtol=1e-6)
    assert (classifier.predict(test) == np.where(chances[:, 1] > 0.5, "yes", "no")).all()
    assert classifier.score(test, truth) > 0.6
    with pytest.raises(TypeError, match=r"a fitted JrecClassifier is not pickled .*\.model_\.save\(FOLDER\)"):
        pickle.dumps(classifier)
    model = jrec.fit(train.assign(label=(wanted == "yes").astype(int)), label="label", seed=1, quiet=True, **QUICK)
    np.testing.assert_array_equal(model.predict(test), chances[:, 1])


def test_it_is_cloned_and_cross_validated():
    classifier = JrecClassifier(**QUICK, time="ts")
    again = pickle.loads(pickle.dumps(clone(classifier)))
    assert again.get_params() == classifier.get_params()
    with pytest.raises(NotFittedError):
        again.predict(columns()[0])
    scores = cross_val_score(JrecClassifier(**QUICK), *columns(), cv=2, scoring="roc_auc")
    assert scores.min() > 0.6


def test_a_time_orders_the_rows_of_early_stopping():
    rows = frame().sample(frac=1, random_state=0)
    classifier = JrecClassifier(**QUICK, time="ts").fit(rows.drop(columns="bought"), rows["bought"] == "yes")
    model = jrec.fit(frame(), label="bought", time="ts", quiet=True, **QUICK)
    assert classifier.model_.metrics["test"]["positives"] == model.metrics["test"]["positives"]
    assert classifier.classes_.tolist() == [False, True]


def test_arrays_have_columns_by_number():
    rng = np.random.default_rng(0)
    rows = np.stack([rng.integers(0, 20, 600), rng.integers(0, 9, 600)], axis=1)
    classifier = JrecClassifier(**QUICK).fit(rows, rows[:, 0] % 2)
    assert classifier.feature_names_in_.tolist() == ["x0", "x1"]
    assert classifier.score(rows, rows[:, 0] % 2) > 0.8


@pytest.mark.parametrize(
    ("rows", "labels", "message"),
    [
        (np.zeros((4, 2)), [0, 1, 2, 1], "y has 3 distinct"),
        (np.zeros((4, 2)), [1, 1, 1, 1], "y has 1 distinct"),
        (np.zeros((4, 2)), [0, 1], "X has 4 rows, but y has 2"),
        (np.zeros(4), [0, 1, 1, 0], "X is an array of 1 dimension"),
    ],
)
def test_what_is_no_table_of_two_classes_is_refused(rows, labels, message):
    with pytest.raises(JrecError, match=message):
        JrecClassifier(**QUICK).fit(rows, labels)


def test_numbers_are_regressed():
    rows = frame()
    X, price = rows.drop(columns=["price", "ts"]), 3 * rows["item"] + (rows["bought"] == "yes")
    regressor = JrecRegressor(epochs=5, quick=True, config=LITTLE["config"])
    assert clone(regressor).get_params() == regressor.get_params()
    train, test, wanted, truth = train_test_split(X, price, random_state=0)
    with pytest.raises(NotFittedError):
        regressor.predict(test)
    assert regressor.fit(train, wanted).score(test, truth) > 0.5
    weights = np.where(np.arange(len(train)) % 2, 1.0, 0.0)
    half = clone(regressor).fit(train, wanted, sample_weight=weights)
    assert half.predict(test).tolist() != regressor.predict(test).tolist()
    with pytest.raises(JrecError, match="but y has 3"):
        regressor.fit(train, [1.0, 2.0, 3.0])
