"""What pyproject.toml cannot say: the folder assets/ travels inside the app package.

So assets are found at ``app/assets`` in an install and at ``assets`` beside ``app`` in a checkout.
"""

from pathlib import Path

from setuptools import find_namespace_packages, setup

packages = find_namespace_packages(include=["engine*", "app*", "lessons*"], exclude=["*.__pycache__*"])
package_dir = {}
if Path("assets").is_dir():
    packages.append("app.assets")
    package_dir["app.assets"] = "assets"

setup(packages=packages, package_dir=package_dir)
