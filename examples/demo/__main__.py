# SPDX-License-Identifier: Apache-2.0
import sys

from examples.demo.run import main

sys.exit(main())
