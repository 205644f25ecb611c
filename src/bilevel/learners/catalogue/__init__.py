"""The few-shot learners: one file each, named like the learner. `bilevel.learners.find` finds them."""
