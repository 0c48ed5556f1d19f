"""The course map, the learner's progress, and all words."""

from app.course.course_page import course_page
from app.course.learner import current_store

course_page(current_store())
