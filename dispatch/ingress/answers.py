"""The table of answers stands in `dispatch.contract.answers`, where the SDK's transport can use it, too."""

from dispatch.contract.answers import (
    ENDINGS,
    EXCEPTIONS,
    INTERNAL,
    JSON,
    REFUSALS,
    Answer,
    Fields,
    Meaning,
    Problem,
    answer_of_problem,
    answer_of_reply,
    problem_of,
    refused,
    rejected,
)

__all__ = [
    "ENDINGS",
    "EXCEPTIONS",
    "INTERNAL",
    "JSON",
    "REFUSALS",
    "Answer",
    "Fields",
    "Meaning",
    "Problem",
    "answer_of_problem",
    "answer_of_reply",
    "problem_of",
    "refused",
    "rejected",
]
