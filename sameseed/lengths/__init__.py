"""Registry of length policies, which decide how many tokens a drafter may draft. One policy per file, in `POLICY`.

`POLICY.build(num_draft_tokens, confidence)` makes a policy. `calibrate(measure)` lets the policy get measured times of
the engine's rounds. Every policy is lossless, because acceptance does not depend on why a draft ended.
"""
