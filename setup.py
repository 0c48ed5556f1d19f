"""What pyproject.toml cannot say: the folder assets/ travels inside the app package.

So assets are found at ``app/assets`` in an install and at ``assets`` beside ``app`` in a checkout.
"""

from pathlib import Path

from setuptools import find_namespace_packages, setup

packages = find_namespace_packages(include=["engine*", "app*", "lessons*"], exclude=["*.__pycache__*"])
package_dir = {}
assets = Path("assets")
for folder in [assets, *sorted(path for path in assets.glob("**/*") if path.is_dir())] if assets.is_dir() else []:
    name = "app." + ".".join(folder.parts)
    packages.append(name)
    package_dir[name] = folder.as_posix()

setup(packages=packages, package_dir=package_dir)
