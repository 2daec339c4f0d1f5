# SPDX-License-Identifier: Apache-2.0
# Install tree: libraries, headers, CMake package, pkg-config; all relocatable.
include(CMakePackageConfigHelpers)
install(TARGETS ctxkv_shared ctxkv_static EXPORT ctxkv_targets
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY include/ctxkv DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(EXPORT ctxkv_targets NAMESPACE ctxkv:: FILE ctxkv-targets.cmake
  DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/ctxkv)
configure_package_config_file(cmake/ctxkv-config.cmake.in ctxkv-config.cmake
  INSTALL_DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/ctxkv)
write_basic_package_version_file(ctxkv-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/ctxkv-config.cmake
  ${CMAKE_CURRENT_BINARY_DIR}/ctxkv-config-version.cmake
  DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/ctxkv)
file(RELATIVE_PATH pc_prefix /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
string(REGEX REPLACE "/$" "" pc_prefix "${pc_prefix}")
configure_file(cmake/ctxkv.pc.in ctxkv.pc @ONLY)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/ctxkv.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
install(FILES LICENSE NOTICE DESTINATION ${CMAKE_INSTALL_DOCDIR})
if(TARGET ctxkv)
  install(TARGETS ctxkv RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()
# The Python wheel holds the library beside its modules, under one name.
if(SKBUILD)
  install(FILES $<TARGET_FILE:ctxkv_shared> DESTINATION ctxkv RENAME libctxkv.so COMPONENT python)
endif()

set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_NAME ctxkv)
set(CPACK_PACKAGE_CONTACT "ctxkv authors <ctxkv@localhost>")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "Context K/V chain of speculative-decoding drafts, the same bits everywhere")
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_PACKAGE_GENERATE_SHLIBS ON)
set(CPACK_DEBIAN_PACKAGE_SECTION libs)
set(CPACK_DEBIAN_PACKAGE_PRIORITY optional)
set(CPACK_RESOURCE_FILE_LICENSE ${CMAKE_CURRENT_SOURCE_DIR}/LICENSE)
set(CPACK_STRIP_FILES ON)
include(CPack)
