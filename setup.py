"""What pyproject.toml cannot say: the folder assets/ travels inside the app package.

So assets are found at ``app/assets`` in an install and at ``assets`` beside ``app`` in a checkout.
"""

from setuptools import find_namespace_packages, setup

setup(
    packages=[*find_namespace_packages(include=["engine*", "app*", "lessons*"]), "app.assets"],
    package_dir={"app.assets": "assets"},
)
