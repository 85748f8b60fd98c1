"""Codes that sampling ops give a row in place of an error: the row's request ends with the message, the step goes on."""

from __future__ import annotations

OK, NOT_FINITE, NOTHING_ALLOWED, PROCESSED_WRONG = 0, 1, 2, 3
ERROR_MESSAGES = {
    NOT_FINITE: "The model's logits for this request are not finite (NaN or infinity).",
    NOTHING_ALLOWED: "No token may follow: the request's masks (allowed ids, bad words, bias, grammar) forbid all of them.",
    PROCESSED_WRONG: "A logits processor of this request left NaN or infinity in its logits.",
}
