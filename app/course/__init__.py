"""The lesson pages' helpers: progress of a learner, pictures of a run, and the blocks of a lesson on the page."""
