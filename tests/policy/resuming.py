"""A gateway that says what its clients have, for tests in which an attempt is lost."""

from __future__ import annotations

from pdactors.messages import Resume
from pdactors.policy.retries import MAX_ATTEMPTS, backoff_s
from pdactors.token_ids import TokenIds


def answered(dispatcher, orders, *generated, now=100.0):
    """Answer every Resume among `orders`, and those that a pause keeps back; return what follows, the others first."""
    now += backoff_s(MAX_ATTEMPTS)
    questions = [order for order in orders if isinstance(order.message, Resume)]
    for name, request in dispatcher.requests.items():
        if request.stage == "resuming" and name not in {question.message.request for question in questions}:
            questions += dispatcher._ask(request, now)
    found = [order for order in orders if order not in questions]
    for to, message in questions:
        found += dispatcher.resume(to, Resume(message.request, message.attempt, TokenIds.of(generated)), now)
    return found
